import os; os.environ["TRITON_INTERPRET"]="1"
import torch, sys, time
from atlas_lm.ops.linear_memory import linear_memory
import atlas_lm.ops.chunk_walk.fused as cw
torch.manual_seed(0)
def case(B=2,T=40,H=2,F=16,V=16,chunk=16,theta=False,c=1,obj='l2',P=0,past=None,length=None,cu=None,keep='states',programs=None, dt=torch.float32):
    if programs: cw.PROGRAMS, cw.SHORTEST = programs, 1
    else: cw.PROGRAMS, cw.SHORTEST = 256, 8
    N=B if cu is None else len(cu)-1
    g=torch.Generator().manual_seed(0)
    r=lambda *s: torch.randn(*s,generator=g)
    n=lambda x: x/x.norm(dim=-1,keepdim=True)
    inp=dict(q=n(r(B,T,H,F)),k=n(r(B,P+T,H,F)),v=r(B,P+T,H,V),eta=torch.rand(B,T,H,generator=g)/4)
    inp['log_alpha']=-torch.rand(B,T,H,generator=g)*0.2; inp['log_alpha'][0,5]=-float('inf')
    if theta: inp['theta']=torch.rand(B,T,H,generator=g)
    if c>1: inp['gamma']=torch.rand(B,T,H,c,generator=g)
    inp['memory']=r(N,H,V,F)
    if theta: inp['momentum']=r(N,H,V,F)
    inp={k_:x.to(dt) if k_ in 'qkv' else x for k_,x in inp.items()}
    out={}
    for form,d in (('fused',None),('parallel',None),('reference',torch.float64)):
        t0=time.time()
        x={k_:(t if d is None else t.to(d)).detach().clone().requires_grad_() for k_,t in inp.items()}
        y,st=linear_memory(**x,chunk=chunk,objective=obj,past=past,length=length,cu_seqlens=cu,form=form,keep=keep)
        outs={'y':y,'M':st.memory,'anc':st.anchor}
        if theta: outs['S']=st.momentum
        gg=torch.Generator().manual_seed(3)
        loss=sum((o.double()*torch.randn(o.shape,generator=gg).double()).sum() for o in outs.values())
        gr=torch.autograd.grad(loss,list(x.values()))
        outs|={'d'+k_:g_ for k_,g_ in zip(x,gr)}
        out[form]={k_:o.detach().double() for k_,o in outs.items()}
        out[form+'t']=time.time()-t0
    bad=[]; 
    for k_ in out['fused']:
        tr=out['reference'][k_]; ok=tr.isfinite()
        e=[((out[f][k_]-tr)[ok].norm()/tr[ok].norm().clamp_min(1e-9)).item() for f in ('fused','parallel')]
        bad.append(f"{k_}:{e[0]:.0e}/{e[1]:.0e}")
    print(' '.join(bad), f"{out['fusedt']:.1f}s")
if __name__=='__main__':
    case()
    case(theta=True)
    case(c=4)
    case(c=4,chunk=32,theta=True,T=70,F=24,V=20)
    case(c=4,P=3,past=torch.tensor([2,3]),theta=True,length=torch.tensor([40,7]))
    case(obj='dot',c=4,theta=True)
    case(B=1,cu=torch.tensor([0,5,22,40]),c=4,theta=True,keep='checkpoints')
    case(B=1,T=100,theta=True,programs=16,c=4)
    case(B=2,T=100,programs=64,c=4,chunk=32,keep='checkpoints',length=torch.tensor([100,20]))
    case(dt=torch.bfloat16,theta=True,c=4)
