#pragma once
#include "/usr/include/linux/icmpv6.h"
