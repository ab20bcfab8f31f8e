#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

namespace prl::dashboard {

/// A value that is no list and no object.
struct Scalar {
  enum class Kind { kNull, kBool, kNumber, kText } kind = Kind::kNull;
  double number = 0;      ///< of a number, and 0 or 1 of a bool
  std::string_view text;  ///< cut to MemberScanner::kMaxText bytes; valid during the call
};

/// Reads one JSON object in pieces and tells its scalar members of the first two levels; all else is checked and forgotten, so memory
/// does not grow with the text. Lists are not entered. Ill-formed UTF-8 is let through.
class MemberScanner {
 public:
  static constexpr std::size_t kMaxText = 512;
  /// Deeper nesting ends the scan with false.
  static constexpr std::size_t kMaxDepth = 256;
  /// `section` is empty for members of the object itself.
  using OnMember = std::function<void(std::string_view section, std::string_view key, const Scalar& value)>;
  explicit MemberScanner(OnMember on_member);
  ~MemberScanner();
  MemberScanner(const MemberScanner&) = delete;
  MemberScanner& operator=(const MemberScanner&) = delete;

  void begin();
  /// False once the text cannot become a JSON object any more.
  bool feed(std::string_view piece);
  /// Whether what was fed is one whole object.
  bool end();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// What other programs write and JSON does not allow, made readable: NaN and infinities as null, halves of
/// surrogate pairs as U+FFFD.
std::string repair_json(std::string_view line);

}  // namespace prl::dashboard
