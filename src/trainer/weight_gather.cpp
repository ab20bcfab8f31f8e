#include "trainer/weight_gather.hpp"

#include <utility>

#include "base/error.hpp"

namespace prl::trainer {

WeightGather::WeightGather(comm::Communicator& world, std::vector<int> members, const ShardPlan& plan)
    : group_(world, std::move(members), "weights", "share weights"), plan_(plan) {}

nn::LateValues WeightGather::start(const Tensor& rounded) {
  under_way_ = std::make_shared<std::vector<std::unique_ptr<comm::Started>>>();
  nn::LateValues late{.values = rounded, .parts = {}, .await = {}};
  for (const ShardPlan::Section& section : plan_.sections()) {
    const ElementRange own = section.parts[static_cast<std::size_t>(group_->rank())];
    group_.among([&] {
      under_way_->push_back(group_->start_all_gather(rounded.slice(section.range.begin, section.range.count()).view(), section.counts(),
                                                     rounded.slice(own.begin, own.count()).view(), {.what = "new weights"}));
    });
    late.parts.push_back(section.range);
  }
  late.await = [this, waiting = std::weak_ptr(under_way_)](std::size_t part) {
    const auto started = waiting.lock();
    // Gone, or joined before, in vain.
    if (started == nullptr || (*started)[part] == nullptr)
      throw comm::PeerLost({}, "new weights were still on their way when the ranks that share them parted");
    group_.among([&] { std::exchange((*started)[part], nullptr)->join(); });
  };
  return late;
}

}  // namespace prl::trainer
