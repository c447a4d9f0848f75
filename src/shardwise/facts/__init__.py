"""What is true, with its source: model shapes, GPUs, links, disks, prices, this machine.

Answers: how big is this model, what can this card do? Must not know: recipes, torch.
"""
