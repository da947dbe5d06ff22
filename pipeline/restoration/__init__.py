"""From a prompt back to a cache: the longest stored prefix, checked, decoded, handed over.

catalogue  what a store holds of one target, and the stored prefixes of a prompt
prefix     a prefix whose blobs were read and checked before anything is decoded
restorer   restoring in one process: layers, chunks, a transformers cache
files      a restored cache as safetensors, in a file or as a stream
together   several prompts decoded together, what they share once
batch      batches of prompts restored into files
batcher    requests of a service, decoded together
pool       decode actors on Ray
"""
