#pragma once
#include "/usr/include/linux/udp.h"
