"""Several processes that train one model: started by torchrun, on FSDP2."""
