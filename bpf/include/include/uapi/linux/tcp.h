#pragma once
#include "/usr/include/linux/tcp.h"
