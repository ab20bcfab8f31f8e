// As asio.cpp, the part that needs OpenSSL.
#include <boost/asio/ssl/impl/src.hpp>
