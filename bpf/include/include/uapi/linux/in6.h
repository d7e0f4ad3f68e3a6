#pragma once
#include "/usr/include/linux/in6.h"
