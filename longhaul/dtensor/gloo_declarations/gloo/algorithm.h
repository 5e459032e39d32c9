// Stands for gloo's header of this name; c10d's header of gloo gets the context through it.
#pragma once

#include "context.h"
