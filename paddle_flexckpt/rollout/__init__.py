"""Give an inference engine the weights of a training job. Modules that run in the engine import no Paddle."""
