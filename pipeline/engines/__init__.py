"""Inference engines that take caches from a store, and give caches to it.

pages            where an engine's paged cache keeps each value
lookup           what of a request the store has: for an engine's scheduler
loader           decoding into pages, and pages into files: for an engine's worker
spool            caches that an engine computed, as files
given            such caches encoded into a store
vllm_sides       what vLLM's scheduler and worker ask for
vllm_connector   the class that vLLM loads; nothing else imports vLLM
"""
