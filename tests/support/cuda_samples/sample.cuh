// Included by sample.cu.
__device__ inline void wait_for_producers() {
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
}
