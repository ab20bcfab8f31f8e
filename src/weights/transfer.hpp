#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "comm/communicator.hpp"
#include "tensor/tensor.hpp"
#include "weights/share.hpp"

namespace prl::weights {

// What trainer and engine say to each other about a transfer. The engine draws a ticket in the trainer's store, puts there what it wants,
// and meets the trainer in a group of two over host memory, in which the trainer offers what it has. The values follow over a DeviceLink,
// or in this group. Where several ranks of a trainer send a part each, the offer of the first names the others, and the engine asks all of
// them at the same time in the same way.

inline constexpr const char* kNextTicket = "weights/next";
inline constexpr const char* kReleased = "weights/released";
inline constexpr std::chrono::milliseconds kStoreTimeout{10'000};
/// For an engine that has drawn a ticket to join its group, and for both to open a link: they have nothing else to do.
inline constexpr std::chrono::milliseconds kJoinTimeout{30'000};
/// For both to connect once they are there: who died in the middle is not waited for much longer, and whoever was only slow is asked again.
inline constexpr std::chrono::milliseconds kConnectTimeout{8'000};

/// How many tickets were drawn, by the value of kNextTicket; nullopt if that is no number.
std::optional<std::int64_t> num_tickets(const std::optional<std::string>& value);
std::string ticket_key(std::int64_t ticket);
std::string group_name(std::int64_t ticket);
/// "localhost" as an address.
std::string bind_host(const std::string& host);
/// This machine's name. Error{kIo} if it has none.
std::string own_machine();

/// What an engine puts behind its ticket.
struct Ask {
  std::int64_t version = 0;
  std::string engine = {};   ///< the same for every transfer to this engine
  std::string device = {};   ///< DevicePath::device; empty: the values must come through host memory
  std::string link = {};     ///< token of the link that it has, if any
  ValueRanges ranges = {};   ///< that it wants; none: what is sent unasked
  std::string adapter = {};  ///< under which name it holds the policy, beside others; empty: as the model
  std::string to_text() const;
  /// Error{kCorrupt} quoting what is not one.
  static Ask parse(const std::string& text);
};

/// What the trainer says before the values.
struct Offer {
  bool has_version = false;
  std::int64_t newest = -1;
  DType dtype = DType::kF32;
  std::int64_t num_values = 0;     ///< of the whole model, or the bytes of an adapter
  bool is_adapter = false;         ///< what follows is one, as nn::peft_image() makes it
  std::string link = {};           ///< token of the link over which the values come; empty: in this group
  ValueRanges ranges = {};         ///< that follow; none if those that were asked for are not here, or if others send all
  std::vector<Share> others = {};  ///< who sends the rest
  std::string to_text() const;
  static Offer parse(const std::string& text);
};

/// Those of `ranges` in `values`, which holds `held`, one after the other.
std::vector<Tensor> pieces_of(const Tensor& values, const ValueRanges& held, const ValueRanges& ranges);
/// Like at both ends: the values of rank 0, in host memory, replace the others'.
void broadcast_values(comm::Communicator& group, const std::vector<Tensor>& pieces, std::chrono::milliseconds timeout);

}  // namespace prl::weights
