"""Only what pyproject.toml cannot say: configs/ is a part of the package in the wheel."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["lrattnres*"]), "lrattnres.configs"],
    package_dir={"lrattnres.configs": "configs"},
    package_data={"lrattnres.configs": ["**/*.yaml"], "lrattnres.report": ["*.csv"]},
)
