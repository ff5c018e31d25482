"""Encoders of images, made from the towers that ipc/models/vision_families.py describes.

Must not know: families of models, files, requests, where the rows of an image go.

    places.py   patches of an image, and what tells a layer where they are
    tower.py    the layers
    encoder.py  images one after another, each as one native call where that is possible
"""
