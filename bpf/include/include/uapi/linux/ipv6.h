#pragma once
#include "/usr/include/linux/ipv6.h"
