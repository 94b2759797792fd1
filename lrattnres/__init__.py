from lrattnres.kernels.backends import depth_attention as depth_attention
