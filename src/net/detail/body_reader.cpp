#include "net/detail/body_reader.hpp"

#include <algorithm>
#include <utility>

#include "base/ascii.hpp"

namespace prl::net::detail {
namespace {

/// Digits of a chunk's size: enough for every size, too few to overflow.
constexpr std::size_t kMaxSizeDigits = 15;
/// The first memory of a body whose length is not known.
constexpr std::size_t kFirstBytes = 16 * 1024;

}  // namespace

BodyReader::BodyReader(const BodyFraming& framing, const Limits& limits, std::shared_ptr<BodyLease> lease)
    : is_chunked_(framing.is_chunked), limits_(limits), lease_(std::move(lease)), num_left_(framing.length) {
  if (is_chunked_) {
    num_left_ = 0;
    return;
  }
  if (num_left_ > limits_.max_body_bytes) state_ = State::kTooLarge;
  if (num_left_ == 0) state_ = State::kDone;
}

void BodyReader::append(std::string_view bytes) {
  const std::size_t wanted = body_.size() + bytes.size();
  if (wanted > limits_.max_body_bytes) {
    state_ = State::kTooLarge;
    return;
  }
  if (wanted > lease_->num_bytes()) {
    // Twice as much at a time, so that growing costs little, but never more than the body can have.
    const std::size_t most = is_chunked_ ? limits_.max_body_bytes : body_.size() + static_cast<std::size_t>(num_left_);
    const std::size_t generous = std::min(most, std::max({wanted, 2 * body_.size(), kFirstBytes}));
    if (!lease_->grow_to(generous) && !lease_->grow_to(wanted)) {
      state_ = State::kNoRoom;
      return;
    }
    body_.reserve(lease_->num_bytes());
  }
  body_.append(bytes);
}

std::size_t BodyReader::feed(std::string_view bytes) {
  std::size_t used = 0;
  while (used < bytes.size() && state_ == State::kMore) {
    if (is_chunked_ && part_ != Part::kData) {
      take_byte(bytes[used++]);
      continue;
    }
    const auto count = static_cast<std::size_t>(std::min<std::uint64_t>(num_left_, bytes.size() - used));
    append(bytes.substr(used, count));
    if (state_ != State::kMore) break;
    used += count;
    num_left_ -= count;
    if (num_left_ > 0) break;
    if (is_chunked_)
      part_ = Part::kDataCr;
    else
      state_ = State::kDone;
  }
  return used;
}

void BodyReader::take_byte(char c) {
  // Lines end with CR LF; a bare LF is refused, since another reader on the way may take it for something else.
  const auto expect = [&](char wanted, Part next) {
    if (c != wanted) state_ = State::kBad;
    part_ = next;
  };
  switch (part_) {
    case Part::kSize: take_size(c); break;
    case Part::kExtension: take_extra(c, Part::kSizeEnd); break;
    case Part::kSizeEnd:
      expect('\n', Part::kData);
      if (state_ == State::kMore) begin_data();
      break;
    case Part::kData: break;
    case Part::kDataCr: expect('\r', Part::kDataLf); break;
    case Part::kDataLf:
      expect('\n', Part::kSize);
      num_digits_ = 0;
      break;
    case Part::kTrailerStart:
      if (c == '\r') {
        part_ = Part::kLastEnd;
        break;
      }
      part_ = Part::kTrailer;
      take_extra(c, Part::kTrailerEnd);
      break;
    case Part::kTrailer: take_extra(c, Part::kTrailerEnd); break;
    case Part::kTrailerEnd: expect('\n', Part::kTrailerStart); break;
    case Part::kLastEnd: state_ = c == '\n' ? State::kDone : State::kBad; break;
  }
}

void BodyReader::take_size(char c) {
  const int value = hex_value(c);
  if (value >= 0 && num_digits_ < kMaxSizeDigits) {
    num_left_ = num_left_ * 16 + static_cast<std::uint64_t>(value);
    ++num_digits_;
  } else if (num_digits_ == 0 || value >= 0) {
    state_ = State::kBad;
  } else if (c == '\r') {
    part_ = Part::kSizeEnd;
  } else if (c == ';' || c == ' ' || c == '\t') {
    part_ = Part::kExtension;
    take_extra(c, Part::kSizeEnd);
  } else {
    state_ = State::kBad;
  }
}

void BodyReader::take_extra(char c, Part at_end) {
  if (c == '\r') {
    part_ = at_end;
    return;
  }
  if (c != '\t' && (static_cast<unsigned char>(c) < 0x20 || c == 0x7f)) state_ = State::kBad;
  if (++num_extra_ > limits_.max_extra_bytes) state_ = State::kTooMuch;
}

void BodyReader::begin_data() {
  if (num_left_ == 0) {
    part_ = Part::kTrailerStart;
    return;
  }
  if (num_left_ > limits_.max_body_bytes - body_.size()) state_ = State::kTooLarge;
  part_ = Part::kData;
}

}  // namespace prl::net::detail
