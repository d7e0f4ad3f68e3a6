#pragma once
#include "/usr/include/linux/if_packet.h"
