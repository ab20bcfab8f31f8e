#include "trainer/member_group.hpp"

#include <fmt/ranges.h>

#include <algorithm>

namespace prl::trainer {

MemberGroup::MemberGroup(comm::Communicator& world, std::vector<int> members, std::string_view name, std::string_view bond)
    : world_(world),
      members_(std::move(members)),
      bond_(bond),
      group_(world.subgroup(members_, fmt::format("{}/{}{}", world.options().group, name, members_.front()), world.generation())) {}

comm::PeerLost MemberGroup::told(const comm::PeerLost& lost) {
  std::vector<int> of_all;
  for (const int rank : lost.ranks()) of_all.push_back(members_[static_cast<std::size_t>(rank)]);
  const comm::PeerLost told(
      of_all, fmt::format("{} (among those that {}; among all ranks: {})", lost.what(), bond_, fmt::join(of_all, ", ")), lost.gave_up());
  world_.give_up_on(told);
  return told;
}

void MemberGroup::give_up_on(const comm::PeerLost& lost) noexcept {
  std::vector<int> of_group;
  for (const int rank : lost.ranks())
    if (const auto found = std::ranges::find(members_, rank); found != members_.end())
      of_group.push_back(static_cast<int>(found - members_.begin()));
  group_->give_up_on(comm::PeerLost(of_group, lost.what(), lost.gave_up()));
}

}  // namespace prl::trainer
