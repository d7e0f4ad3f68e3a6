#pragma once
#include "/usr/include/linux/if_ether.h"
