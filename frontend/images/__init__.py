"""Images of a prompt: from bytes and URLs to what the encoder reads.

`media.py` opens what a request gives, `web.py` fetches it, `pictures.py` decodes it. `families.py`
says for each family how a picture is resized and cut, and which tokens stand for it. `images.py`
puts these together. Pillow is imported when the first image arrives, not before.
"""
