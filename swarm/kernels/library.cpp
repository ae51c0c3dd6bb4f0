// Kernels for few rows, where reading the weights or the cache from memory is all the work there is, and for what
// goes over the wire.
//
// Registered as `torch.ops.swarm_native`; built by `swarm/native.py` with whatever C++ compiler the machine has,
// against torch's stable interface. Everything here exists in torch too: without a compiler nothing is lost but speed.

#include "attention.h"
#include "blocks.h"
#include "elementwise.h"
#include "packed_rows.h"
#include "products.h"
#include "quantized.h"

namespace swarm {

int64_t lanes() { return LANES; }

}  // namespace swarm

STABLE_TORCH_LIBRARY(swarm_native, library) {
  library.def("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor");
  library.def(
      "attend_rows(Tensor query, Tensor key, Tensor value, Tensor[] all_keys, Tensor[] all_values, int[] pasts, "
      "int window, float scale) -> Tensor");
  library.def(
      "blocks(Tensor hidden, Tensor cos, Tensor sin, Tensor[] parts, Tensor[] all_keys, Tensor[] all_values, "
      "int[] pasts, int[] windows, float[] epsilons, float[] scales) -> Tensor");
  library.def("widened(Tensor weight, int inputs, Tensor like) -> Tensor");
  library.def("rms_norm(Tensor x, Tensor weight, float epsilon) -> Tensor");
  library.def("rotated(Tensor x, Tensor cos, Tensor sin) -> Tensor");
  library.def("gated(Tensor gate, Tensor up) -> Tensor");
  library.def("pack_rows(Tensor rows, Tensor(a!) data) -> int");
  library.def("unpack_rows(Tensor data, Tensor(a!) rows) -> int");
  library.def("lanes() -> int");
}

STABLE_TORCH_LIBRARY_IMPL(swarm_native, CPU, library) {
  library.impl("linear", TORCH_BOX(&swarm::linear));
  library.impl("widened", TORCH_BOX(&swarm::widened));
  library.impl("attend_rows", TORCH_BOX(&swarm::attend_rows));
  library.impl("rms_norm", TORCH_BOX(&swarm::rms_norm));
  library.impl("rotated", TORCH_BOX(&swarm::rotated));
  library.impl("gated", TORCH_BOX(&swarm::gated));
  library.impl("blocks", TORCH_BOX(&swarm::blocks));
  library.impl("pack_rows", TORCH_BOX(&swarm::pack_rows));
  library.impl("unpack_rows", TORCH_BOX(&swarm::unpack_rows));
}

STABLE_TORCH_LIBRARY_IMPL(swarm_native, CompositeExplicitAutograd, library) {
  library.impl("lanes", TORCH_BOX(&swarm::lanes));
}
