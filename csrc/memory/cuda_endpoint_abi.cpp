// Compares the declarations of csrc/memory/logical_endpoint.h with cuda.h, where that is new enough to have them.
#include <cuda.h>

#if CUDA_VERSION >= 13040

#include <cstddef>
#include <type_traits>

#include "csrc/memory/logical_endpoint.h"

namespace moe_ep::endpoint {
namespace {

// Two types that a call passes alike: pointers, or integers and enumerations of one size.
template <class A, class B>
constexpr bool kPassedAlike =
    sizeof(A) == sizeof(B) && std::is_pointer_v<A> == std::is_pointer_v<B> && !std::is_class_v<A> &&
    !std::is_class_v<B> && !std::is_floating_point_v<A> && !std::is_floating_point_v<B>;

// What a pointer points to has one size too, and what is read only is so in both.
template <class A, class B>
constexpr bool kPointsAlike = true;
template <class A, class B>
constexpr bool kPointsAlike<A*, B*> = std::is_const_v<A> == std::is_const_v<B>;
template <class A, class B>
  requires(!std::is_void_v<A> && !std::is_void_v<B>)
constexpr bool kPointsAlike<A*, B*> = std::is_const_v<A> == std::is_const_v<B> && sizeof(A) == sizeof(B);

template <class A, class B>
constexpr bool kSameCall = false;
template <class R, class... A, class S, class... B>
  requires(sizeof...(A) == sizeof...(B))
constexpr bool kSameCall<R (*)(A...), S (*)(B...)> =
    kPassedAlike<R, S> && (... && (kPassedAlike<A, B> && kPointsAlike<A, B>));

#define MOE_EP_COMPARE(name, parameters) static_assert(kSameCall<decltype(Driver::name), decltype(&::name)>, #name);
MOE_EP_ENDPOINT_CALLS(MOE_EP_COMPARE)

#define MOE_EP_SAME_SIZE(ours, theirs) static_assert(sizeof(ours) == sizeof(theirs) && alignof(ours) == alignof(theirs))
#define MOE_EP_SAME_PLACE(ours, member, theirs, their_member)                                                          \
  static_assert(offsetof(ours, member) == offsetof(theirs, their_member) &&                                            \
                sizeof(ours::member) == sizeof(theirs::their_member))
MOE_EP_SAME_SIZE(Properties, CUlogicalEndpointProp);
MOE_EP_SAME_PLACE(Properties, type, CUlogicalEndpointProp, type);
MOE_EP_SAME_PLACE(Properties, device, CUlogicalEndpointProp, unicast);
MOE_EP_SAME_PLACE(Properties, size, CUlogicalEndpointProp, size);
MOE_EP_SAME_PLACE(Properties, handle_types, CUlogicalEndpointProp, ipcHandleTypes);
MOE_EP_SAME_PLACE(Properties, flags, CUlogicalEndpointProp, flags);
MOE_EP_SAME_SIZE(FabricHandle, CUlogicalEndpointFabricHandle);
MOE_EP_SAME_SIZE(Clique, CUcliqueInfo);
MOE_EP_SAME_PLACE(Clique, type, CUcliqueInfo, type);
MOE_EP_SAME_PLACE(Clique, id, CUcliqueInfo, id);

static_assert(kCapabilityMajor == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
static_assert(kCapabilityMinor == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
static_assert(kUnicastSupported == CU_DEVICE_ATTRIBUTE_LOGICAL_ENDPOINT_UNICAST_SUPPORTED);
static_assert(kCountedOpsSupported == CU_DEVICE_ATTRIBUTE_LOGICAL_ENDPOINT_COUNTED_OPS_SUPPORTED);
static_assert(kOwnerAccessSupported == CU_DEVICE_ATTRIBUTE_LOGICAL_ENDPOINT_UNICAST_ACCESS_ON_OWNER_DEVICE_SUPPORTED);
static_assert(kSupportedHandleTypes == CU_DEVICE_ATTRIBUTE_LOGICAL_ENDPOINT_SUPPORTED_HANDLE_TYPES);
static_assert(kUnicast == CU_LOGICAL_ENDPOINT_TYPE_UNICAST);
static_assert(kFabric == CU_LOGICAL_ENDPOINT_IPC_HANDLE_TYPE_FABRIC);
static_assert(kCountedOps == CU_LOGICAL_ENDPOINT_FLAG_COUNTED_OPS);
static_assert(kUnicastClique == CU_CLIQUE_TYPE_UNICAST_LOGICAL_ENDPOINT);
static_assert(kIllegalState == CUDA_ERROR_ILLEGAL_STATE);
static_assert(kNotPermitted == CUDA_ERROR_NOT_PERMITTED);
static_assert(kSystemNotReady == CUDA_ERROR_SYSTEM_NOT_READY);

}  // namespace
}  // namespace moe_ep::endpoint

#endif
