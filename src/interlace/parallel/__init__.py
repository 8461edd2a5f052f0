"""How a plain model is laid out over ranks: device meshes and DTensor plans."""
