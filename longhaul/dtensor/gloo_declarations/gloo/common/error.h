// Stands for gloo's header of this name; c10d's header of gloo includes it and uses nothing of it.
#pragma once
