import torch
import torch.distributed as dist


def hello(rank, size, port):  # spawn passes the rank, as the first argument
    gpu = torch.device("cuda", rank) if torch.cuda.device_count() >= size else None  # NCCL: one rank on a GPU
    store = dist.TCPStore("127.0.0.1", port)  # the table over which the ranks exchange addresses
    dist.init_process_group("nccl" if gpu else "gloo", store=store, rank=rank, world_size=size, device_id=gpu)
    dist.barrier()  # no rank leaves while another is still connecting to it
    print(f"rank {rank} of {size}: we are all here\n", end="")  # one piece: the ranks share the terminal
    dist.destroy_process_group()


if __name__ == "__main__":  # true only in the program that you started
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # 0: any free port
    torch.multiprocessing.spawn(hello, args=(2, store.port), nprocs=2)
