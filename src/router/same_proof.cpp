#include "router/same_proof.hpp"

#include <boost/json/object.hpp>
#include <boost/json/parse.hpp>
#include <boost/json/serialize.hpp>
#include <boost/system/error_code.hpp>

#include "base/error.hpp"

namespace prl::router {

namespace json = boost::json;

void SameProof::check(const std::string& reply, const std::string& url) {
  boost::system::error_code error;
  const json::value parsed = json::parse(reply, error);
  const json::object* object = error ? nullptr : parsed.if_object();
  const json::value* checksum = object ? object->if_contains("checksum") : nullptr;
  const json::value* probe = object ? object->if_contains("probe_logprobs") : nullptr;
  if (!checksum || !probe) fail(ErrorCode::kCorrupt, "{} answered the change with no proof: {}", url, reply.substr(0, 200));
  const std::string proof = json::serialize(*checksum) + " " + json::serialize(*probe);
  const std::lock_guard lock(mutex_);
  if (!first_) {
    first_ = proof;
    body_ = reply;
  } else if (*first_ != proof) {
    fail(ErrorCode::kOutOfSync, "{} proves other weights than the first engine: {} and {}", url, proof.substr(0, 60),
         first_->substr(0, 60));
  }
}

std::string SameProof::body() const {
  const std::lock_guard lock(mutex_);
  return body_;
}

}  // namespace prl::router
