"""The recipe of the demo pair: a Llama target, and a draft distilled from it, trained on Python's standard library.

    python -m gsd_kernels_train.recipes.demo_pair --out pair

reads the ``*.py`` files of the running interpreter's standard library, trains a byte-level BPE tokenizer and the
target, lets the target write some text, distils the draft on both, trains heads for the target, and leaves in
``pair/demo_pair`` what this package ships: ``target/``, ``draft/``, ``heads/``, ``prompts.json``, ``sources.json`` and
a model card with the measured numbers. Every stage resumes from ``pair/work``, so an interrupted run continues where it
stopped.

On Linux, ``GLIBC_TUNABLES=glibc.malloc.hugetlb=1 MALLOC_MMAP_THRESHOLD_=4294967296 MALLOC_TOP_PAD_=268435456`` in the
environment saves about a tenth of the time on a CPU: activations are then neither mapped anew nor in small pages.
On a machine that others use too, ``OMP_WAIT_POLICY=passive`` saves far more.
"""
