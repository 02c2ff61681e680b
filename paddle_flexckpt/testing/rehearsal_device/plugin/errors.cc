// Errors with a text, raised through Paddle.
#include <cstdarg>
#include <cstdio>

#include "paddle/common/enforce.h"
#include "rehearsal.h"

namespace rehearsal {

std::string text(const char* format, ...) {
  char line[1024];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(line, sizeof line, format, arguments);
  va_end(arguments);
  return line;
}

void refuse(const std::string& why) { PADDLE_THROW(common::errors::PermissionDenied("rehearsal device: %s", why)); }

}  // namespace rehearsal
