// What a step must keep to fit its communicator, checked before anything is sent. Throws ArgumentError with the name
// of the argument, what was expected and what came.
#pragma once

#include "csrc/communicator.h"

namespace moe_ep {

// The outputs of a dispatch grow with R: called before they are allocated, for an R out of range is no lack of memory.
void check_tokens_per_rank(const Communicator& comm, Phase phase, int64_t tokens_per_rank);
void check_fits(const Communicator& comm, const DispatchArgs& args);
void check_fits(const Communicator& comm, const CombineArgs& args);

}  // namespace moe_ep
