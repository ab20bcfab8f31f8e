#pragma once

#include <optional>
#include <string_view>

namespace prl::env {

/// Whether a given answer is the wanted one, as a person who knows mathematics would say; close to what math-verify says, which is
/// compared on 2,000 pairs (math_env_test.cpp). Equal are
///   the same number, exactly: "1,000" and "1000", "0.75" and "\frac{3}{4}"; a unit or sign of per cent behind it does not count, but
///     "50\%" is also "0.5". A decimal and what has no finite one agree when rounded to six places;
///   formulas with the same values at four choices of their variables: "(x+2)^2" and "x^2+4x+4", "\sqrt{8}" and "2\sqrt{2}";
///   tuples in order; sets, lists without brackets ("2, 3", "2 and 3") and unions in any order, and a set and a tuple of the same;
///   intervals with the same ends, [ and ( told apart; an inequality and the interval it means, where the inequality is wanted;
///   equations and inequalities that hold for the same values; "x = 7" and "7"; matrices, cell by cell;
///   otherwise texts that are the same but for white space, case and typesetting.
/// Never throws on any text.
bool is_same_answer(std::string_view given, std::string_view wanted);

/// The same, nullopt where the texts differ and one of them is nothing that can be read.
std::optional<bool> compare_answers(std::string_view given, std::string_view wanted);

}  // namespace prl::env
