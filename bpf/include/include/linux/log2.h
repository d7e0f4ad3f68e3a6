/* Stands in for the kernel's own header: bcc includes it and uses nothing of it. */
#pragma once
