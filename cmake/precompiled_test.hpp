// As precompiled.hpp, for the unit tests.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "precompiled.hpp"
