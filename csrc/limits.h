// What a step must keep to fit its communicator, checked before anything is sent. Throws ArgumentError with the name
// of the argument, what was expected and what came.
#pragma once

#include "csrc/communicator.h"

namespace moe_ep {

void check_fits(const Communicator& comm, const DispatchArgs& args);
void check_fits(const Communicator& comm, const CombineArgs& args);

}  // namespace moe_ep
