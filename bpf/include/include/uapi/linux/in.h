#pragma once
#include "/usr/include/linux/in.h"
