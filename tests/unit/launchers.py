"""Variables as launchers set them: rank 5 of several nodes each."""

JOB = {
    "SLURM_JOB_ID": "12",
    "SLURM_JOBID": "12",
    "SLURM_NTASKS": "16",
    "SLURM_NPROCS": "16",
    "SLURM_NNODES": "4",
    "SLURM_JOB_NUM_NODES": "4",
    "SLURM_TASKS_PER_NODE": "4(x4)",
    "SLURM_NODELIST": "n[07-10]",
    "SLURM_JOB_NODELIST": "n[07-10]",
    "SLURM_SUBMIT_HOST": "login1",
}
STEP = {
    **JOB,
    "SLURM_STEP_ID": "0",
    "SLURM_STEPID": "0",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_STEP_NODELIST": "n[07-10]",
    "SLURM_NTASKS": "7",
    "SLURM_TASKS_PER_NODE": "2(x3),1",
    "SLURM_DISTRIBUTION": "block",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.99",
    "SLURM_SRUN_COMM_HOST": "10.0.0.99",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_GTIDS": "4,5",
    "SLURMD_NODENAME": "n09",
}
OPEN_MPI_4 = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "OMPI_COMM_WORLD_NODE_RANK": "3",
    "OMPI_UNIVERSE_SIZE": "16",
    "OMPI_MCA_ess_base_jobid": "2783903745",
    "OMPI_MCA_ess_base_vpid": "5",
    "OMPI_MCA_orte_ess_node_rank": "3",
    "OMPI_MCA_orte_precondition_transports": "a1c168efc0bec49a-f545dbd10fa12394",
    "PMIX_ID": "2783903745.5",
    "PMIX_NAMESPACE": "2783903745",
    "PMIX_RANK": "5",
}
OPEN_MPI_5 = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "OMPI_COMM_WORLD_NODE_RANK": "3",
    "PMIX_NAMESPACE": "prterun-node0-4711@1",
    "PMIX_RANK": "5",
}
MPICH = {
    "PMI_RANK": "5",
    "PMI_SIZE": "8",
    "PMI_FD": "8",
    "HYDI_CONTROL_FD": "7",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "4",
    "MPIR_CVAR_CH3_INTERFACE_HOSTNAME": "node1",
}
INTEL_MPI = {
    "PMI_RANK": "5",
    "PMI_SIZE": "8",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "4",
    "I_MPI_ROOT": "/opt/intel/mpi",
    "I_MPI_HYDRA_UUID": "9d260000-7c26-e807-8fb4-050000430af0",
}
PMIX = {"PMIX_RANK": "5", "PMIX_NAMESPACE": "psrvr-17", "PMIX_SERVER_URI4": "pmix-server.1;tcp4://"}
PMIX_BY_HAND = {**PMIX, "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}


def without(environ: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}
