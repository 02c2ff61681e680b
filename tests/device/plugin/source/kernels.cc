// All kernels in one source: the compiler reads the headers of Paddle, which are large, once.
#include "kernels_elementwise.cc"
#include "kernels_gradient.cc"
#include "kernels_layer.cc"
#include "kernels_movement.cc"
#include "kernels_optimizer.cc"
#include "kernels_random.cc"
#include "kernels_reduction.cc"
