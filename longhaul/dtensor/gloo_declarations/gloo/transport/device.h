// Stands for gloo's header of this name; the device is declared in context.h.
#pragma once
