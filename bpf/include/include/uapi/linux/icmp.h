#pragma once
#include "/usr/include/linux/icmp.h"
