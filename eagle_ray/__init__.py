"""eagle_ray: batch inference on Ray with EAGLE-2 speculative decoding, token for token what plain decoding gives."""

__version__ = "0.1.0"
