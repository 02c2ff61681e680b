"""FlexCheckpoint in the trainers of PaddleNLP and PaddleFormers."""
