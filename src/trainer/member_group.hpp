#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "comm/communicator.hpp"

namespace prl::trainer {

/// A group of some ranks of the world beside the groups that they have, whose losses are the world's too. One thread, but for abort().
class MemberGroup {
 public:
  /// Every rank of `world` calls it, `members` in the order in which they are numbered; `world` is borrowed. `name` tells it from other
  /// groups of the same members; `bond` says in errors what its members have in common ("share layers"). PeerLost.
  MemberGroup(comm::Communicator& world, std::vector<int> members, std::string_view name, std::string_view bond);

  comm::Communicator& operator*() const noexcept { return *group_; }
  comm::Communicator* operator->() const noexcept { return group_.get(); }
  /// work(), with ranks in PeerLost as the world counts them; the world ends with it.
  template <typename Work>
  void among(const Work& work) {
    try {
      work();
    } catch (const comm::PeerLost& lost) {
      throw told(lost);
    }
  }
  void abort(std::string_view reason) noexcept { group_->abort(reason); }
  /// Communicator::give_up_on; ranks as the world counts them.
  void give_up_on(const comm::PeerLost& lost) noexcept;

 private:
  comm::PeerLost told(const comm::PeerLost& lost);

  comm::Communicator& world_;
  std::vector<int> members_;  ///< in the world
  std::string bond_;
  std::unique_ptr<comm::Communicator> group_;
};

}  // namespace prl::trainer
