"""The saved view "overview" of a project: the curves that people look at first, over the step, as the page of a run shows them."""
import traceback

NAME = "overview"
SECTIONS = [
    ("Learning", [("Reward", ["reward/all/mean"]), ("Pass rate (groups solved by all)", ["solve_all/all"]), ("Loss", ["loss/mean"]), ("Entropy", ["entropy/all/mean"]), ("Mismatch KL", ["mismatch_kl/all/mean"]),
                  ("Gradient norm", ["optim/grad_norm"])]),
    ("Rollouts", [("Completion length", ["decode_len/all/mean"]), ("Truncated", ["is_truncated/all/mean"]), ("Staleness", ["off_policy_level/all/mean"])]),
    ("Speed", [("Throughput", ["perf/throughput"]), ("MFU", ["perf/mfu"]), ("Step time", ["time/step"])]),
]
QUERY = """query ProjectViews($entity: String, $project: String) {
  project(name: $project, entityName: $entity) { allViews(viewType: "project-view") { edges { node { displayName } } } }
}"""


def _has_view(entity, project):
    import wandb
    from wandb_workspaces._graphql import execute_graphql
    found = execute_graphql(wandb.Api(), QUERY, {"entity": entity, "project": project}).get("project") or {}
    return any(edge["node"]["displayName"] == NAME for edge in (found.get("allViews") or {}).get("edges", []))


def save(entity, project):
    """Makes the view unless the project has it. True if it is there then; without the package wandb-workspaces, or where the server refuses, it is not,
    which costs the run nothing but the view."""
    try:
        import wandb_workspaces.reports.v2 as panels
        import wandb_workspaces.workspaces as workspaces
        if not _has_view(entity, project):
            sections = [workspaces.Section(name=name, is_open=True, panels=[panels.LinePlot(title=title, x="step", y=keys) for title, keys in charts]) for name, charts in SECTIONS]
            workspaces.Workspace(entity=entity, project=project, name=NAME, sections=sections, settings=workspaces.WorkspaceSettings(x_axis="step")).save()
        return True
    except Exception:
        traceback.print_exc()
        return False
