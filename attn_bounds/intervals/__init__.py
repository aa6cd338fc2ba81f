"""Small general networks decided by interval arithmetic with outward rounding; needs no torch.

arithmetic.py: intervals. functions.py: elementary functions. dual.py: values with derivatives. table.py and
the files it names: ONNX operators. network.py: a file. query.py: a VNN-LIB 2.0 query. solve.py: the search.
replay.py: the same points in onnxruntime.
"""
