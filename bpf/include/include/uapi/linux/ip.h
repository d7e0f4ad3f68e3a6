#pragma once
#include "/usr/include/linux/ip.h"
