#pragma once
#include "/usr/include/linux/pkt_cls.h"
