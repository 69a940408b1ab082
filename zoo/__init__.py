"""The zoo: real models of the public libraries, small and untrained, under hmpx and torch.autocast.

python -m zoo                    # sweeps all models, writes docs/evidence/zoo.md
python -m zoo --sample 12        # a dozen, one of each family first
python -m zoo --models 'llama*'  # by name
"""
