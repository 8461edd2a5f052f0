"""Checkpoint folders on disk: written whole, checked before they are read, read on any mesh.

What a session puts in is `train.session_state`, when it is saved `train.checkpointer`.

request.py          what a configuration asks of checkpoints, and whether that can be
folders.py          folders that are whole or not there, and checks of their files
manifest.py         which tensors there are, where each piece lies, and plain state
tensor_files.py     tensors to safetensors files and back, on any mesh
background_save.py  the part of a save that runs beside training
to_hugging_face.py  a checkpoint as a Hugging Face folder, on one process
"""
