#include "base/base64.hpp"

#include <gtest/gtest.h>

#include "base/error.hpp"

namespace prl {
namespace {

TEST(Base64, VectorsOfTheRfc) {
  const std::pair<const char*, const char*> kVectors[] = {
      {"", ""}, {"f", "Zg=="}, {"fo", "Zm8="}, {"foo", "Zm9v"}, {"foob", "Zm9vYg=="}, {"fooba", "Zm9vYmE="}, {"foobar", "Zm9vYmFy"}};
  for (const auto& [bytes, text] : kVectors) {
    EXPECT_EQ(to_base64(bytes), text);
    EXPECT_EQ(from_base64(text), bytes);
  }
}

TEST(Base64, EveryByteComesBack) {
  std::string bytes;
  for (int i = 0; i < 256; ++i) bytes += static_cast<char>(i);
  for (std::size_t length : {253u, 254u, 255u, 256u}) EXPECT_EQ(from_base64(to_base64(bytes.substr(0, length))), bytes.substr(0, length));
}

TEST(Base64, WhatIsNoBase64IsRefused) {
  for (const char* text : {"Zg=", "Zg", "Z===", "====", "Zm9\n", "Z=9v", "Zm-_"}) EXPECT_THROW(from_base64(text), Error) << text;
}

}  // namespace
}  // namespace prl
