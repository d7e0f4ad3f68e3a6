/* Empty: bcc puts its own copy of this header into every program. */
#pragma once
