"""These modules load a checkpoint's weights to the device and allocate the KV cache next to them."""
